"""The gateway's chat page."""
