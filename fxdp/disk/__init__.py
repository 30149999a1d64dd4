"""What is kept on disk between runs, in a folder that nobody else can write."""
