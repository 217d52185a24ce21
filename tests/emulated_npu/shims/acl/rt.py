def memcpy(*_arguments: object, **_keywords: object) -> None:
    raise NotImplementedError("pyACL is not part of the emulated NPU: sleep mode cannot run")
