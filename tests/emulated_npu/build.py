"""Builds the fake CANN from cann/*.c against one installed torch_npu wheel.

Nothing binary is kept in the repository: the entry points that the wheel expects are read from its own ELF files.
Link-time symbols that cann/ does not implement become functions that name themselves and abort; names that torch_npu
looks up at run time (`dlsym`) and that cann/ does not implement are simply absent, which torch_npu reports itself.
Every aclnn operator gets an entry point, since only the numerics know which of them are implemented.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).with_name("cann")
#: The libraries that torch_npu, op-plugin and vllm-ascend load by name. One file serves them all.
SONAMES = [
    "libascendcl.so",
    "libhccl.so",
    "libopapi.so",
    "libnnopbase.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libatb.so",
    "libacl_tdt_channel.so",
    "libfmk_parser.so",
    "libascend_protobuf.so",
    "libruntime.so",
]
#: Saves what the caller passed (System V ABI, x86_64): six integer registers, eight floating-point registers; the rest
#: lies on the stack behind the return address. Then calls TARGET(name, integers, doubles, stack).
TRAMPOLINE = """
{label}:
    pushq %rbp
    movq %rsp, %rbp
    subq $112, %rsp
    movq %rdi, -112(%rbp)
    movq %rsi, -104(%rbp)
    movq %rdx, -96(%rbp)
    movq %rcx, -88(%rbp)
    movq %r8, -80(%rbp)
    movq %r9, -72(%rbp)
    movsd %xmm0, -64(%rbp)
    movsd %xmm1, -56(%rbp)
    movsd %xmm2, -48(%rbp)
    movsd %xmm3, -40(%rbp)
    movsd %xmm4, -32(%rbp)
    movsd %xmm5, -24(%rbp)
    movsd %xmm6, -16(%rbp)
    movsd %xmm7, -8(%rbp)
    movq %rax, %rdi
    leaq -112(%rbp), %rsi
    leaq -64(%rbp), %rdx
    leaq 16(%rbp), %rcx
    call {target}@PLT
    leave
    ret
"""
#: Symbols that the C library, the loader or a sanitiser provides when it likes: weak, not ours.
FOREIGN = re.compile(r"_?Py|_ITM_|__gmon_start__|__cxa|_ZTH|_ZGTt")


def symbols(files: Iterable[Path], which: str) -> set[str]:
    out: set[str] = set()
    for file in files:
        text = subprocess.run(["nm", "-D", f"--{which}-only", file], capture_output=True, text=True, check=True).stdout
        out |= {line.split()[-1].split("@")[0] for line in text.splitlines() if line.strip()}
    return out


def missing_symbols(wheel: Path, torch_lib: Path) -> set[str]:
    """Link-time symbols that torch_npu expects from CANN."""
    own = [*wheel.rglob("*.so"), *wheel.parent.glob("torch_npu.libs/*")]
    system = subprocess.run(["ldd", torch_lib / "libtorch_cpu.so"], capture_output=True, text=True, check=True).stdout
    others = [Path(p) for p in re.findall(r"(/\S+)", system)] + list(torch_lib.glob("*.so*"))
    return {name for name in symbols(own, "undefined") - symbols([*own, *others], "defined") if not FOREIGN.match(name)}


def aclnn_operators(wheel: Path) -> list[str]:
    """Operators whose two phases torch_npu looks up in libopapi.so, from the strings of its library."""
    text = (wheel / "lib/libtorch_npu.so").read_bytes()
    found = {m.decode() for m in re.findall(rb"\0(aclnn[A-Z]\w+)(?=\0)", text)}
    found |= {m.decode() for m in re.findall(rb"(?<=\0)(aclnn[A-Z]\w+)\0", text)}
    return sorted(
        {name.removesuffix("GetWorkspaceSize") for name in found} - {"aclnnNpuFormatCastCalculateSizeAndFormat"}
    )


def _operator_entries(names: list[str]) -> str:
    lines = [".text", TRAMPOLINE.format(label="workspace_entry", target="fakecann_workspace")]
    lines.append(TRAMPOLINE.format(label="execute_entry", target="fakecann_execute"))
    for i, name in enumerate(names):
        only_asks = name.endswith("GetMaxWorkspaceSize")  # has one phase, that of the workspace
        for symbol, entry in (
            (name, "workspace_entry" if only_asks else "execute_entry"),
            (name + "GetWorkspaceSize", "workspace_entry"),
        ):
            lines.append(
                f".globl {symbol}\n.type {symbol}, @function\n{symbol}:\n    leaq .Lname{i}(%rip), %rax\n    jmp "
                f"{entry}"
            )
    lines.append(".section .rodata")
    lines += [f'.Lname{i}: .string "{name}"' for i, name in enumerate(names)]
    lines.append('.section .note.GNU-stack, "", @progbits\n')
    return "\n".join(lines)


def build(wheel: Path, torch_lib: Path, out: Path) -> None:
    """wheel: the installed `torch_npu` folder; torch_lib: `torch/lib`; out: where the libraries go."""
    out.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{wheel / 'include/third_party' / part}" for part in ("acl/inc", "hccl/inc")]
    library = out / "libfakecann.so"
    compile_ = [
        "gcc",
        "-std=gnu11",
        "-O2",
        "-g",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-function",
        "-fvisibility=hidden",
    ]
    sources = sorted(SOURCES.glob("*.c"))
    objects = []
    for source in sources:
        objects.append(out / (source.stem + ".o"))
        subprocess.run(
            [*compile_, *includes, "-c", source, "-o", objects[-1]], check=True, capture_output=True, text=True
        )
    defined = subprocess.run(["nm", "--defined-only", *objects], capture_output=True, text=True, check=True).stdout
    implemented = {line.split()[2] for line in defined.splitlines() if len(line.split()) == 3}
    stubs = sorted(missing_symbols(wheel, torch_lib) - implemented)
    unlisted = out / "unlisted.c"
    body = "".join(
        f'__attribute__((visibility("default"))) void {n}(void) {{ fakecann_unlisted("{n}"); }}\n' for n in stubs
    )
    unlisted.write_text("void fakecann_unlisted(const char *);\n" + body)
    entries = out / "operators.S"
    entries.write_text(_operator_entries(aclnn_operators(wheel)))
    link: list[str | Path] = [
        "gcc",
        "-shared",
        "-fPIC",
        "-w",
        *objects,
        unlisted,
        entries,
        "-o",
        library,
        "-lpthread",
        "-lrt",
    ]
    subprocess.run(link, check=True, capture_output=True, text=True)
    for name in SONAMES:
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(library.name)


if __name__ == "__main__":
    build(*(Path(a) for a in sys.argv[1:4]))
