"""The same programs as users of other libraries write them, one module a library; each is imported when it runs."""
