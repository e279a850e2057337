"""Replay buffers for the trainers of other libraries, one module for each; importing one imports its library."""
