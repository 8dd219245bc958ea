"""Which op on which device."""
