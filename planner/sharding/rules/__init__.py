"""The registry of sharding rules. Importing this package walks the folder: each file registers a family of operations.

To add an operation write `planner/sharding/rules/<family>.py` that calls `register(OpRule(...))`. Nothing else changes.
"""

import importlib
import pkgutil

from .registry import (
    AxisRef,
    Call,
    Factor,
    Operand,
    OpRule,
    Option,
    Saved,
    SeedRef,
    interesting_groups,
    kept_kernels,
    label_groups,
    ops_holding,
    options_of,
    plain_label,
    register,
    registered_ops,
    rule_of,
    saved_of,
)

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    if _module != "registry":
        importlib.import_module(f"{__name__}.{_module}")

__all__ = [
    "AxisRef", "Call", "Factor", "OpRule", "Operand", "Option", "Saved", "SeedRef", "interesting_groups",
    "kept_kernels", "label_groups", "ops_holding", "options_of", "plain_label", "register", "registered_ops",
    "rule_of", "saved_of",
]  # fmt: skip
