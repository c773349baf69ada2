"""The parameter server: versioned weights, handed out on request, never pushed."""
