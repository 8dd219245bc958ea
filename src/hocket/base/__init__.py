"""What every room stands on: errors, units, arrays, settings, and files: checked, written whole."""
