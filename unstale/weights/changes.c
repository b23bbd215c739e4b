/*
 * The words that differ between two tensors, for words of 8, 16, 32 and 64 bits: finding, joining
 * and applying them. And sums of words.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512VBMI2__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define COMPRESS 1
#endif

enum { ESCAPE = 255, BLOCK = 1024, STEP = 32 };

/* Write the indices of the bytes that are not zero. Return their number. */
static int positions(const uint8_t *nonzero, int length, uint16_t *where)
{
    int found = 0;
#ifdef COMPRESS
    uint16_t first[STEP];
    for (int j = 0; j < STEP; j++)
        first[j] = (uint16_t)j;
    const __m512i lanes = _mm512_loadu_si512(first);
    for (int i = 0; i < length; i += STEP) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(nonzero + i));
        __mmask32 mask = _mm256_test_epi8_mask(bytes, bytes);
        __m512i at = _mm512_add_epi16(lanes, _mm512_set1_epi16((short)i));
        _mm512_storeu_si512(where + found, _mm512_maskz_compress_epi16(mask, at));
        found += __builtin_popcount(mask);
    }
#else
    for (int i = 0; i < length; i += 8) {
        uint64_t any;
        memcpy(&any, nonzero + i, 8);
        if (!any)
            continue;
        for (int j = i; j < i + 8; j++) {
            where[found] = (uint16_t)j;
            found += nonzero[j];
        }
    }
#endif
    return found;
}

/* Write the gaps between positions of a block, `before` words after the last earlier change. */
static int64_t write_gaps(const uint16_t *where, int found, int64_t before, uint8_t *gaps)
{
    uint16_t between[BLOCK], largest = 0;
    for (int n = 1; n < found; n++) {
        between[n] = (uint16_t)(where[n] - where[n - 1] - 1);
        largest = between[n] > largest ? between[n] : largest;
    }
    int64_t coded = 0;
    for (before += where[0]; before >= ESCAPE; before -= ESCAPE)
        gaps[coded++] = ESCAPE;
    gaps[coded++] = (uint8_t)before;
    if (largest < ESCAPE) {
        for (int n = 1; n < found; n++)
            gaps[coded + n - 1] = (uint8_t)between[n];
        return coded + found - 1;
    }
    for (int n = 1; n < found; n++) {
        int gap = between[n];
        for (; gap >= ESCAPE; gap -= ESCAPE)
            gaps[coded++] = ESCAPE;
        gaps[coded++] = (uint8_t)gap;
    }
    return coded;
}

/* Return the word after `where` that a gap leads to, or INT64_MAX after the last one. */
static inline int64_t next_word(const uint8_t **gaps, const uint8_t *end, int64_t where)
{
    while (*gaps < end) {
        uint8_t gap = *(*gaps)++;
        where += gap;
        if (gap != ESCAPE)
            return where + 1;
    }
    return INT64_MAX;
}

/* Return the sum of words, each mixed with its place as in changes.py. `place` is the first one's. */
uint64_t sum_words(const uint64_t *words, int64_t count, int64_t place)
{
    uint64_t total = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t mixed = words[i] ^ (uint64_t)(place + i + 1) * 0x9E3779B97F4A7C15u;
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u;
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
        total += mixed ^ mixed >> 31;
    }
    return total;
}

/*
 * changes_BITS writes the gaps and the byte planes of the changed words, as in codec.py, and
 * returns the number of changed words. If these are more than `limit`, the gaps and planes are
 * incomplete. `gaps` has room for limit + words / 255 + 1 bytes, and each of the planes for
 * `limit`. `num_gaps` receives the number of bytes written to `gaps`.
 *
 * split_BITS writes the byte planes of all words, each of which has room for `words` bytes.
 *
 * `after` may be NULL: then `before` is the difference itself.
 *
 * apply_BITS changes the words of `target` to which the gaps lead, by the words of the planes.
 *
 * apply_planes_BITS changes all words of `target` by those of the planes.
 *
 * merge_BITS writes the changes that two sets of changes make together, and returns their number.
 * `planes` has the planes of the first set, then those of the second. `made` are planes for `limit`
 * words each. `num_made` receives the number of bytes written to `made_gaps`.
 */
#define FUNCTIONS(BITS)                                                                            \
    static const uint##BITS##_t zeros_##BITS[BLOCK]; /* in place of a second tensor */             \
                                                                                                   \
    int64_t changes_##BITS(const uint##BITS##_t *before, const uint##BITS##_t *after,              \
                           int64_t words, int64_t limit, uint8_t *gaps, uint8_t *planes,           \
                           int64_t *num_gaps)                                                      \
    {                                                                                              \
        uint##BITS##_t differences[BLOCK], changed[BLOCK];                                         \
        uint8_t nonzero[BLOCK + STEP];                                                             \
        uint16_t where[BLOCK + STEP];                                                              \
        int64_t count = 0, coded = 0, last = -1;                                                   \
        for (int64_t begin = 0; begin < words; begin += BLOCK) {                                   \
            const uint##BITS##_t *left = before + begin;                                           \
            const uint##BITS##_t *right = after ? after + begin : zeros_##BITS;                    \
            int length = words - begin < BLOCK ? (int)(words - begin) : BLOCK;                     \
            for (int i = 0; i < length; i++) {                                                     \
                differences[i] = left[i] ^ right[i];                                               \
                nonzero[i] = differences[i] != 0;                                                  \
            }                                                                                      \
            memset(nonzero + length, 0, STEP);                                                     \
            int found = positions(nonzero, length, where);                                         \
            if (found && count + found <= limit) {                                                 \
                coded += write_gaps(where, found, begin - last - 1, gaps + coded);                 \
                last = begin + where[found - 1];                                                   \
                for (int n = 0; n < found; n++)                                                    \
                    changed[n] = differences[where[n]];                                            \
                for (int byte = 0; byte < BITS / 8; byte++) {                                      \
                    uint8_t *plane = planes + byte * limit + count;                                \
                    for (int n = 0; n < found; n++)                                                \
                        plane[n] = (uint8_t)(changed[n] >> 8 * byte);                              \
                }                                                                                  \
            }                                                                                      \
            count += found;                                                                        \
        }                                                                                          \
        *num_gaps = coded;                                                                         \
        return count;                                                                              \
    }                                                                                              \
                                                                                                   \
    void split_##BITS(const uint##BITS##_t *before, const uint##BITS##_t *after, int64_t words,    \
                      uint8_t *planes)                                                             \
    {                                                                                              \
        for (int64_t begin = 0; begin < words; begin += BLOCK) {                                   \
            const uint##BITS##_t *left = before + begin;                                           \
            const uint##BITS##_t *right = after ? after + begin : zeros_##BITS;                    \
            int length = words - begin < BLOCK ? (int)(words - begin) : BLOCK;                     \
            for (int byte = 0; byte < BITS / 8; byte++) {                                          \
                uint8_t *plane = planes + byte * words + begin;                                    \
                for (int i = 0; i < length; i++)                                                   \
                    plane[i] = (uint8_t)((left[i] ^ right[i]) >> 8 * byte);                        \
            }                                                                                      \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    static inline uint##BITS##_t word_##BITS(const uint8_t *const *planes, int64_t n)              \
    {                                                                                              \
        uint##BITS##_t word = 0;                                                                   \
        for (int byte = 0; byte < BITS / 8; byte++)                                                \
            word |= (uint##BITS##_t)((uint##BITS##_t)planes[byte][n] << 8 * byte);                 \
        return word;                                                                               \
    }                                                                                              \
                                                                                                   \
    void apply_##BITS(const uint8_t *gaps, int64_t num_gaps, const uint8_t *const *planes,         \
                      uint##BITS##_t *target)                                                      \
    {                                                                                              \
        const uint8_t *end = gaps + num_gaps;                                                      \
        int64_t where = next_word(&gaps, end, -1);                                                 \
        for (int64_t n = 0; where != INT64_MAX; n++) {                                             \
            target[where] ^= word_##BITS(planes, n);                                               \
            where = next_word(&gaps, end, where);                                                  \
        }                                                                                          \
    }                                                                                              \
                                                                                                   \
    void apply_planes_##BITS(const uint8_t *const *planes, int64_t words, uint##BITS##_t *target)  \
    {                                                                                              \
        for (int64_t n = 0; n < words; n++)                                                        \
            target[n] ^= word_##BITS(planes, n);                                                   \
    }                                                                                              \
                                                                                                   \
    int64_t merge_##BITS(const uint8_t *const *gaps, const int64_t *num_gaps,                      \
                         const uint8_t *const *planes, int64_t limit, uint8_t *made_gaps,          \
                         uint8_t *made, int64_t *num_made)                                         \
    {                                                                                              \
        const uint8_t *left = gaps[0], *left_end = left + num_gaps[0];                             \
        const uint8_t *right = gaps[1], *right_end = right + num_gaps[1];                          \
        const uint8_t *const *right_planes = planes + BITS / 8;                                    \
        int64_t i = 0, j = 0, count = 0, coded = 0, last = -1;                                     \
        int64_t here = next_word(&left, left_end, -1), there = next_word(&right, right_end, -1);   \
        while (here != INT64_MAX || there != INT64_MAX) {                                          \
            int64_t where = here < there ? here : there;                                           \
            uint##BITS##_t word = 0;                                                               \
            if (here == where) {                                                                   \
                word ^= word_##BITS(planes, i++);                                                  \
                here = next_word(&left, left_end, here);                                           \
            }                                                                                      \
            if (there == where) {                                                                  \
                word ^= word_##BITS(right_planes, j++);                                            \
                there = next_word(&right, right_end, there);                                       \
            }                                                                                      \
            if (!word)                                                                             \
                continue;                                                                          \
            int64_t gap = where - last - 1;                                                        \
            for (; gap >= ESCAPE; gap -= ESCAPE)                                                   \
                made_gaps[coded++] = ESCAPE;                                                       \
            made_gaps[coded++] = (uint8_t)gap;                                                     \
            last = where;                                                                          \
            for (int byte = 0; byte < BITS / 8; byte++)                                            \
                made[byte * limit + count] = (uint8_t)(word >> 8 * byte);                          \
            count++;                                                                               \
        }                                                                                          \
        *num_made = coded;                                                                         \
        return count;                                                                              \
    }

FUNCTIONS(8)
FUNCTIONS(16)
FUNCTIONS(32)
FUNCTIONS(64)
