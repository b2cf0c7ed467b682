"""A pytest plugin (``-p tests.gpu.no_pool``): each device array has an allocation of its own.

CuPy's pool cuts arrays out of larger pieces, past whose inner edges compute-sanitizer sees nothing.
"""

import cupy

cupy.cuda.set_allocator(None)
