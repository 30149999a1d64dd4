"""How fast is it, and how much does it hold and send, beside what else there is?"""
