"""One script a question; each prints a table and then, as its last line, one JSON object."""
