"""One OpenAI-compatible address in front of several engines, and what clients say of the answers they got."""
