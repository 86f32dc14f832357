// The texts in other languages; what is missing stays English.  Terms are those of the book's translations.

const WORDS = { de: {}, zh: {}, tr: {} };
