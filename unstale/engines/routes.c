/* Expert routes in the JSON of a reply: where they are, and their base64. */

#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>

enum { BLOCK = 4096, INVALID = 255 };

static int is_space(uint8_t c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* Find the string that is the value of the only member called `name`, which includes its quotes.

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

static uint8_t value_of(uint8_t c)
{
    uint8_t upper = (uint8_t)(c - 'A'), lower = (uint8_t)(c - 'a'), digit = (uint8_t)(c - '0');
    uint8_t value = INVALID;
    value = upper < 26 ? upper : value;
    value = lower < 26 ? (uint8_t)(lower + 26) : value;
    value = digit < 10 ? (uint8_t)(digit + 52) : value;
    value = c == '+' ? 62 : value;
    value = c == '/' ? 63 : value;
    return value;
}

/* Decode base64 to `bytes`, which has 3 bytes for 4 characters. Returns how many bytes are used.

   Returns -1 for other characters, for spaces and for incomplete padding. */
int64_t decode(const uint8_t *text, int64_t length, uint8_t *bytes)
{
    if (length % 4)
        return -1;
    int64_t padding = length ? (text[length - 1] == '=') + (text[length - 1] == '=' && text[length - 2] == '=') : 0;
    int64_t characters = length - padding;
    uint8_t values[BLOCK], invalid = 0;
    for (int64_t start = 0; start < length; start += BLOCK) {
        int64_t count = characters - start < BLOCK ? characters - start : BLOCK;
        int64_t whole = (count + 3) / 4 * 4;
        for (int64_t i = 0; i < count; i++) {
            values[i] = value_of(text[start + i]);
            invalid |= values[i] & 64;
        }
        for (int64_t i = count; i < whole; i++)
            values[i] = 0;
        for (int64_t i = 0; i < whole; i += 4, bytes += 3) {
            uint32_t joined = (uint32_t)values[i] << 18 | (uint32_t)values[i + 1] << 12
                            | (uint32_t)values[i + 2] << 6 | values[i + 3];
            bytes[0] = (uint8_t)(joined >> 16);
            bytes[1] = (uint8_t)(joined >> 8);
            bytes[2] = (uint8_t)joined;
        }
    }
    return invalid ? -1 : length / 4 * 3 - padding;
}
