"""values → files and folders that are whole, locked and checked."""
