"""Inference engines: what `collector.engine.Engine` asks for, by vLLM and by transformers."""
