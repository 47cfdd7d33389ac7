"""The gateway: an OpenAI-compatible API, a chat page, and one worker process per loaded model."""
