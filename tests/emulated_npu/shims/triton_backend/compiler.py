from typing import Any

from triton.backends.compiler import BaseBackend


class InterpreterOnly(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return target.backend == "npu"

    def hash(self) -> str:
        return "emulated-npu"

    def parse_options(self, options: Any) -> Any:
        raise NotImplementedError("the emulated NPU compiles nothing: set TRITON_INTERPRET=1")

    def add_stages(self, stages: Any, options: Any, language: Any = None) -> None:
        raise NotImplementedError("the emulated NPU compiles nothing: set TRITON_INTERPRET=1")

    def load_dialects(self, context: Any) -> None:
        return None

    def get_module_map(self) -> dict[str, Any]:
        return {}
