"""Worker processes: started, listened to, stepped together; shared memory and wake-ups between them."""
