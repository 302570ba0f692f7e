"""Training engines: forward, backward, optimizer, and the hybrid of training and generation."""
