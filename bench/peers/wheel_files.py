"""Imports Python files out of other projects' wheels, with stubs in place of the packages that they were taken from."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from ..harness.declaration import Unavailable


class Stub(ModuleType):
    """Has the names that it is given, and every other one as a function that answers no."""

    def __init__(self, name: str, **names: object):
        super().__init__(name)
        vars(self).update(names)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: False


def import_file(file: Path, stand_ins: Mapping[str, ModuleType]) -> ModuleType:
    """Imports a file while the stand-ins are the modules of these names."""
    if not file.exists():
        raise Unavailable(f"{file} does not exist")
    spec = importlib.util.spec_from_file_location(f"{__package__}.{file.parent.name}.{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    before = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Unavailable(f"{file.name} does not import: {type(error).__name__}: {error}") from None
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(before)
    return module
