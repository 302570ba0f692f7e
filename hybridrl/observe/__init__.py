"""What a run leaves behind and shows: its folder, metrics, console, curves and summary."""
