"""How buffers and their parts are saved, loaded and made anew."""
