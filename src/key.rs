//! What `bouncer key new` and `bouncer key hash` do.
//!
//! Give a key to `bouncer key hash` on standard input rather than as an argument: arguments are shown to every user of
//! the machine in its list of processes, and stay in the history of the shell.

use std::fmt::Write;
use std::io::{self, Read};

use crate::identity::KeyHash;

/// Longer texts are no keys: Envoy takes 60 KiB for all headers of a request by default.
const LONGEST: u64 = 8 * 1024;

/// Why there is no key. Never holds any part of the text.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what it means")]
pub enum KeyError {
    #[error("the key is empty")]
    Empty,
    #[error("the key has white space inside")]
    WhiteSpace,
    #[error("the key holds a control character, which no header can carry")]
    Control,
    #[error("this is a hash already: put it into the configuration as it is")]
    Hashed,
    #[error("the key is longer than {LONGEST} bytes")]
    Long,
    #[error("the key is not UTF-8 text")]
    NotText,
    #[error("cannot read the key from standard input")]
    Read(#[source] io::Error),
    #[error("the system gives no random bytes")]
    Random(#[source] getrandom::Error),
}

/// A new key: `bk_` and 32 random bytes as 64 hexadecimal digits.
///
/// # Errors
/// [`KeyError::Random`].
pub fn new_key() -> Result<String, KeyError> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(KeyError::Random)?;
    Ok(hex("bk_", &bytes))
}

/// A key as the configuration may hold it in place of the key itself: `sha256:` and 64 hexadecimal digits.
pub fn hash_line(key: &str) -> String {
    hex("sha256:", &KeyHash::of(key.as_bytes()).0)
}

/// The key given as an argument, or else the one on `stdin`, which is read to its end.
///
/// # Errors
/// As [`trimmed`]; and when `stdin` cannot be read, is too long or is no text.
pub fn read_key(argument: Option<&str>, stdin: impl Read) -> Result<String, KeyError> {
    if let Some(key) = argument {
        return trimmed(key).map(str::to_owned);
    }
    let mut text = Vec::new();
    stdin.take(LONGEST + 1).read_to_end(&mut text).map_err(KeyError::Read)?;
    if text.len() as u64 > LONGEST {
        return Err(KeyError::Long);
    }
    let text = str::from_utf8(&text).map_err(|_| KeyError::NotText)?;
    trimmed(text).map(str::to_owned)
}

/// The key in a text that people and their tools write: without the newline that `echo` adds, the byte order mark that an
/// editor adds, and any other white space around it.
///
/// # Errors
/// When nothing is left, or what is left could never arrive in a header: it is too long, or holds white space or a
/// control character.
pub fn trimmed(text: &str) -> Result<&str, KeyError> {
    let key = text.trim_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    if key.is_empty() {
        Err(KeyError::Empty)
    } else if key.len() as u64 > LONGEST {
        Err(KeyError::Long)
    } else if key.contains(char::is_whitespace) {
        Err(KeyError::WhiteSpace)
    } else if key.contains(char::is_control) {
        Err(KeyError::Control)
    } else if key.starts_with("sha256:") {
        Err(KeyError::Hashed)
    } else {
        Ok(key)
    }
}

fn hex(prefix: &str, bytes: &[u8]) -> String {
    bytes.iter().fold(prefix.to_owned(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_new_key_is_visible_ascii_and_never_the_same() {
        let (one, other) = (new_key().expect("random bytes"), new_key().expect("random bytes"));
        assert_ne!(one, other);
        for key in [&one, &other] {
            let digits = key.strip_prefix("bk_").expect("the prefix");
            assert_eq!(digits.len(), 64);
            assert!(digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
            assert_eq!(trimmed(key).ok(), Some(key.as_str()), "it is a key by its own rules");
        }
    }

    #[test]
    fn a_hash_is_not_taken_for_a_key() {
        assert!(matches!(trimmed(&hash_line("key")), Err(KeyError::Hashed)));
    }

    #[test]
    fn a_hash_is_written_as_sha256sum_writes_it() {
        let abc = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(hash_line("abc"), abc);
    }

    #[test]
    fn what_tools_add_around_a_key_is_not_part_of_it() {
        for text in ["k-1", "k-1\n", "k-1 \r\n", "\u{feff}k-1", " \t\u{feff}k-1\n\n", "\u{a0}k-1"] {
            assert_eq!(read_key(None, text.as_bytes()).ok().as_deref(), Some("k-1"), "{text:?}");
            assert_eq!(read_key(Some(text), io::empty()).ok().as_deref(), Some("k-1"), "{text:?}");
        }
    }

    #[test]
    fn an_argument_is_taken_before_standard_input() {
        assert_eq!(read_key(Some("k-1"), "k-2".as_bytes()).ok().as_deref(), Some("k-1"));
    }

    #[test]
    fn a_text_that_no_header_can_carry_is_no_key() {
        let error = |text: &[u8]| read_key(None, text).expect_err("no key").to_string();
        assert_eq!(error(b""), "the key is empty");
        assert_eq!(error(b" \n"), "the key is empty");
        assert_eq!(error(b"k 1"), "the key has white space inside");
        assert_eq!(error(b"k-1\nk-2\n"), "the key has white space inside");
        assert_eq!(error(b"k\x001"), "the key holds a control character, which no header can carry");
        assert_eq!(error(b"k\xff"), "the key is not UTF-8 text");
        assert_eq!(error(&[b'k'; 8193]), "the key is longer than 8192 bytes");
        assert!(read_key(None, [b'k'; 8192].as_slice()).is_ok());
    }

    #[test]
    fn a_failing_standard_input_is_an_error() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("gone"))
            }
        }
        assert!(matches!(read_key(None, Broken), Err(KeyError::Read(_))));
    }

    proptest! {
        #[test]
        fn no_error_shows_any_part_of_the_text(text in "[XYZ\u{0} ]{5,40}") {
            if let Err(error) = trimmed(&text) {
                let shown = format!("{error} {error:?}");
                prop_assert!(!shown.contains(['X', 'Y', 'Z']));
            }
        }

        #[test]
        fn any_bytes_can_be_read(text: Vec<u8>) {
            if let Ok(key) = read_key(None, text.as_slice()) {
                prop_assert!(!key.is_empty() && !key.contains(char::is_whitespace));
            }
        }
    }
}
