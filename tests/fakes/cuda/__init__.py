"""CUDA without a GPU: fake libraries in C that write down every call, programs that use them, and what follows."""
