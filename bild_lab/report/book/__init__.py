"""The lab book: one page, `outputs/index.html`, over everything that was measured, trained, compared and drawn."""
