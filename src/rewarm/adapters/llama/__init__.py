"""rewarm for llama.cpp: a codec for slot files, and the seam to an unmodified llama-server."""
