"""CUDA activity of any process by eBPF probes on libcudart, libcuda and libnccl."""
