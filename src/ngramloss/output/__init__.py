"""results and messages → what a person reads: terminal, Markdown, LaTeX."""
