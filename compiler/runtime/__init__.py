"""Functions that emitted code calls: collectives with gradients, and operations that communicate inside.

They are written to be read: code generation copies the ones a plan needs, with what they call, into `collectives.py` of
the package. They import torch only, and no name is used twice among the modules.
"""

import importlib
import inspect
import pkgutil

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    _found = importlib.import_module(f"{__name__}.{_module}")
    globals().update(
        {name: value for name, value in vars(_found).items() if inspect.isfunction(value) and not name.startswith("_")}
    )
