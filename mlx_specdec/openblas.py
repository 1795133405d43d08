"""Give MLX's CPU backend a fast BLAS on Linux.

The Linux wheel of MLX resolves its matrix products in the reference BLAS. OpenBLAS exports the same symbols, so
putting it in the global symbol table before `mlx.core` is first imported replaces them: a 64x576x1536 float32
product fell from 77 ms to 2 ms on two cores.
"""

import ctypes
import sys


def preload() -> bool:
    """Load OpenBLAS globally where that helps; returns whether it was. Call before `mlx.core` is imported."""
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return False
    try:
        ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True
