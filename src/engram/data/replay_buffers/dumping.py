PARTS = ("storage", "sampler", "writer", "generator")
