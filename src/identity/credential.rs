//! The value of a credential header, read byte by byte: clients write it, so it may be anything.

/// What a value turned out to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading<'a> {
    /// No credential: an empty value, or a scheme without its token.
    Nothing,
    /// A key, perhaps one of ours.
    Key(&'a [u8]),
    /// A credential that cannot be a key of ours.
    Malformed,
}

/// Reads `Bearer <key>`: the scheme in any case, then one space or more (RFC 9110, section 11.4; RFC 6750, section 2.1).
///
/// Another scheme is a credential too, only none of ours.
pub(super) fn bearer(value: &[u8]) -> Reading<'_> {
    let value = trim(value);
    let scheme_ends = value.iter().position(|byte| *byte == b' ').unwrap_or(value.len());
    let (scheme, token) = value.split_at(scheme_ends);
    if scheme.is_empty() {
        Reading::Nothing
    } else if scheme.eq_ignore_ascii_case(b"bearer") {
        bare(token)
    } else {
        Reading::Malformed
    }
}

/// Reads a key that is the whole value.
pub(super) fn bare(value: &[u8]) -> Reading<'_> {
    let key = trim(value);
    if key.is_empty() {
        Reading::Nothing
    } else if key.iter().copied().any(is_ows) {
        // No key holds white space (`bouncer key hash` and the configuration refuse it), but two header lines that a
        // proxy joined do.
        Reading::Malformed
    } else {
        Reading::Key(key)
    }
}

/// Without the optional white space around a field value (RFC 9110, section 5.6.3), and without any other byte less.
fn trim(mut value: &[u8]) -> &[u8] {
    while let [first, rest @ ..] = value
        && is_ows(*first)
    {
        value = rest;
    }
    while let [rest @ .., last] = value
        && is_ows(*last)
    {
        value = rest;
    }
    value
}

fn is_ows(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_scheme_may_be_written_in_any_case_and_the_key_may_not() {
        for value in ["Bearer k-1", "bearer k-1", "BEARER k-1", "bEaReR k-1"] {
            assert_eq!(bearer(value.as_bytes()), Reading::Key(b"k-1"), "{value}");
        }
        assert_eq!(bearer(b"Bearer K-1"), Reading::Key(b"K-1"));
    }

    #[test]
    fn spaces_around_a_key_are_not_part_of_it() {
        assert_eq!(bearer(b" \tBearer    k-1 \t "), Reading::Key(b"k-1"));
        assert_eq!(bare(b"\t k-1 \t"), Reading::Key(b"k-1"));
    }

    #[test]
    fn other_bytes_around_a_key_are_part_of_it() {
        assert_eq!(bare(b"k-1\n"), Reading::Key(b"k-1\n"));
        assert_eq!(bare("\u{feff}k-1".as_bytes()), Reading::Key("\u{feff}k-1".as_bytes()));
        assert_eq!(bare(b"\"k-1\""), Reading::Key(b"\"k-1\""));
    }

    #[test]
    fn nothing_to_hold_against_the_directory_counts_as_no_key() {
        for value in ["", " ", " \t ", "Bearer", "bearer", "Bearer ", "Bearer   \t"] {
            assert_eq!(bearer(value.as_bytes()), Reading::Nothing, "{value:?}");
        }
        assert_eq!(bare(b""), Reading::Nothing);
        assert_eq!(bare(b" \t"), Reading::Nothing);
    }

    #[test]
    fn another_scheme_is_no_key_of_ours() {
        for value in ["Basic dTpw", "Basic", "k-1", "Bearerk-1", "Bearer:k-1", "Bearer\tk-1", "Digest realm=\"a\""] {
            assert_eq!(bearer(value.as_bytes()), Reading::Malformed, "{value:?}");
        }
    }

    #[test]
    fn two_lines_joined_by_a_proxy_are_no_key_of_ours() {
        for value in ["Bearer k-1, Bearer k-2", "Bearer k-1,Bearer k-2", "Bearer k-1 k-2", "Bearer k-1\tk-2"] {
            assert_eq!(bearer(value.as_bytes()), Reading::Malformed, "{value:?}");
        }
        assert_eq!(bare(b"k-1, k-1"), Reading::Malformed);
    }

    #[test]
    fn a_bare_key_that_looks_like_a_scheme_is_not_read_as_one() {
        assert_eq!(bare(b"Bearer"), Reading::Key(b"Bearer"));
        assert_eq!(bare(b"Bearer k-1"), Reading::Malformed);
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(value: Vec<u8>) {
            for reading in [bearer(&value), bare(&value)] {
                if let Reading::Key(key) = reading {
                    prop_assert!(!key.is_empty());
                    prop_assert!(!key.iter().copied().any(is_ows));
                    prop_assert!(value.windows(key.len()).any(|window| window == key));
                }
            }
        }

        #[test]
        fn a_key_is_found_whole_whatever_its_bytes(
            key in prop::collection::vec(any::<u8>().prop_filter("white space", |byte| !is_ows(*byte)), 1..80),
            before in "[ \t]{0,3}",
            scheme in "[bB][eE][aA][rR][eE][rR] {1,3}",
            after in "[ \t]{0,3}",
        ) {
            let around = |inner: &[u8]| [before.as_bytes(), inner, after.as_bytes()].concat();
            let (alone, behind_scheme) = (around(&key), around(&[scheme.as_bytes(), &key].concat()));
            prop_assert_eq!(bare(&alone), Reading::Key(&key));
            prop_assert_eq!(bearer(&behind_scheme), Reading::Key(&key));
        }
    }
}
