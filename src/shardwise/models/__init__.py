"""GPT-2 and Llama as plain NNX modules, their losses, and sampling.

Each module is imported on first use: `shardwise.models.gpt` works after `import shardwise`.
"""

import pkgutil

import lazy_loader

_MODULES = {module.name for module in pkgutil.iter_modules(__path__)}
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=_MODULES)
