"""The HTTP front end, compatible with OpenAI's clients."""
