"""Ways for published weights to get from the trainer to the engines, chosen by `param_server.transport`."""
