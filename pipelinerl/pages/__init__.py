"""Reports in words: each becomes a ``Page`` once, which terminal, HTML, Markdown and notebook render."""
