"""What is about CPUs only: MindSpore's threads, oneDNN's instructions, and faster kernels."""
