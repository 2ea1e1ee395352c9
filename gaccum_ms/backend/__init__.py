"""What touches MindSpore's private or undocumented side, and checks of arguments."""
