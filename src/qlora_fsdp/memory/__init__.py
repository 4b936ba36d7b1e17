"""What a run needs of GPU and host memory, and how long it takes, before it starts. No torch but where noted."""
