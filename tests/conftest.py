"""Without CUDA the Triton kernels are tested through Triton's interpreter.

Triton reads the variable when it is first imported, which any library may do: so it is set here.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
