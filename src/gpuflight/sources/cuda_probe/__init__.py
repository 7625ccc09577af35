"""CUDA activity of any process by eBPF probes on libcudart, libcuda and libnccl.

``probe.CudaProbe`` hooks files and reads; ``rows`` says what a reading holds; ``functions`` lists what is hooked and
``symbols`` finds it in a file. The kernel side is ``sources/bpf/c/cuda.bpf.c``.
"""
