from emulated_npu.plugin import *  # noqa: F403
