"""Launch, placement, supervision and deadlines, on Ray."""
