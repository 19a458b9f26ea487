"""What one request asks for and what it gets: prompt, sampling, its tokens."""
