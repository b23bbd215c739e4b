/* Routed experts in the JSON of a reply: where they are, and their base64. */

#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>

enum { INVALID = 255 };

static int is_space(uint8_t c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* Find the string that is the value of the only member called `name`. `name` includes its quotes.

   Writes where its quotes are, and returns 1. Returns 0 if there is none, if several members have
   this name, or if the string has an escape. Inside a string a quote is written with a backslash
   before it, so `name` with its quotes and a colon behind it can only be a member. */
int find_value(const uint8_t *text, int64_t length, const char *name, int64_t *first, int64_t *last)
{
    const size_t name_length = strlen(name);
    const uint8_t *end = text + length, *from = text, *at;
    int found = 0;
    while ((at = memmem(from, (size_t)(end - from), name, name_length))) {
        from = at += name_length;
        while (at < end && is_space(*at))
            at++;
        if (at == end || *at++ != ':')
            continue;
        while (at < end && is_space(*at))
            at++;
        if (at == end || *at != '"' || found)
            return 0;
        const uint8_t *stop = memchr(at + 1, '"', (size_t)(end - at - 1));
        if (!stop || memchr(at, '\\', (size_t)(stop - at)))
            return 0;
        *first = at - text;
        *last = stop - text;
        from = stop + 1;
        found = 1;
    }
    return found;
}

/* Write the value of each character in base64, or INVALID, to `values`. */
static void fill(uint8_t *values)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    memset(values, INVALID, 256);
    for (int i = 0; i < 64; i++)
        values[(uint8_t)letters[i]] = (uint8_t)i;
}

/* Decode base64 to `bytes`, which has 3 bytes for 4 characters. Returns how many bytes are used.

   Returns -1 for other characters, for spaces and for incomplete padding. */
int64_t decode(const uint8_t *text, int64_t length, uint8_t *bytes)
{
    if (length % 4)
        return -1;
    uint8_t values[256];
    fill(values);
    uint32_t seen = 0;
    int64_t whole = length && text[length - 1] == '=' ? length - 4 : length;
    for (int64_t i = 0; i < whole; i += 4, bytes += 3) {
        uint32_t a = values[text[i]], b = values[text[i + 1]], c = values[text[i + 2]], d = values[text[i + 3]];
        uint32_t joined = a << 18 | b << 12 | c << 6 | d;
        seen |= a | b | c | d;
        bytes[0] = (uint8_t)(joined >> 16);
        bytes[1] = (uint8_t)(joined >> 8);
        bytes[2] = (uint8_t)joined;
    }
    int64_t padding = 0;
    if (whole < length) { /* the last four characters end with one or two `=` */
        const uint8_t *last = text + whole;
        padding = last[2] == '=' ? 2 : 1;
        uint32_t a = values[last[0]], b = values[last[1]], c = padding == 2 ? 0 : values[last[2]];
        seen |= a | b | c;
        bytes[0] = (uint8_t)(a << 2 | b >> 4);
        if (padding == 1)
            bytes[1] = (uint8_t)(b << 4 | c >> 2);
    }
    return seen > 63 ? -1 : length / 4 * 3 - padding;
}
