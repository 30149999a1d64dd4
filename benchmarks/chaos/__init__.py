"""What happens when ranks fail, hang, are killed, or train on for long."""
