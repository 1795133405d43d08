from .openblas import preload as _preload

_preload()
