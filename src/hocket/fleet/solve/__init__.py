"""How shares are found: classes of equal jobs, prices of devices, levels that rise together."""
