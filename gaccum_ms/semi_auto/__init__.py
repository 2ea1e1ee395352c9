"""The modes in which MindSpore's compiler distributes the graph and accumulates."""
