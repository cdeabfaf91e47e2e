//! JSON lines: `{"key": KEY, "value": VALUE}`, an object a line.
//!
//! Bytes that are UTF-8 are JSON strings; others are objects `{"base64": "..."}`. Both are accepted
//! for any bytes. Unknown or repeated members are errors, so that nothing is dropped unseen.

use std::fmt;

use base64::engine::general_purpose::STANDARD;
use base64::{DecodeError, Engine};
use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Record;

/// Bytes as JSON: a string if they are UTF-8, else `{"base64": "..."}`.
#[derive(Clone, Copy, Debug)]
pub struct JsonBytes<'a>(pub &'a [u8]);

impl Serialize for JsonBytes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Ok(text) = std::str::from_utf8(self.0) {
            return serializer.serialize_str(text);
        }
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry("base64", &STANDARD.encode(self.0))?;
        map.end()
    }
}

/// A key and a value as JSON.
#[derive(Serialize)]
pub struct JsonRecord<'a> {
    /// The key.
    pub key: JsonBytes<'a>,
    /// The value.
    pub value: JsonBytes<'a>,
}

struct OwnedJsonBytes(Vec<u8>);

impl<'de> Deserialize<'de> for OwnedJsonBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BytesVisitor;
        impl<'de> Visitor<'de> for BytesVisitor {
            type Value = OwnedJsonBytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(r#"a string or {"base64": "..."}"#)
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(OwnedJsonBytes(text.as_bytes().to_vec()))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let Some((name, text)) = map.next_entry::<String, String>()? else {
                    return Err(de::Error::missing_field("base64"));
                };
                if name != "base64" {
                    return Err(de::Error::unknown_field(&name, &["base64"]));
                }
                if map.next_key::<String>()?.is_some() {
                    return Err(de::Error::custom("more than one member beside \"base64\""));
                }
                let decoded = STANDARD.decode(&text).map(OwnedJsonBytes);
                decoded.map_err(|error| de::Error::custom(why_not_base64(&text, &error)))
            }
        }
        deserializer.deserialize_any(BytesVisitor)
    }
}

fn why_not_base64(text: &str, error: &DecodeError) -> String {
    match error {
        DecodeError::InvalidByte(at, byte) if *byte != b'=' => {
            // The byte may be the first of several that make a character.
            let wrong = text.get(*at..).and_then(|rest| rest.chars().next()).unwrap_or('?');
            format!("`{}` is no base64", wrong.escape_debug())
        }
        _ => "this is no base64: its end is missing, or the `=` there are wrong".to_string(),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OwnedJsonRecord {
    key: OwnedJsonBytes,
    value: OwnedJsonBytes,
}

/// Adds a record's line to `out`.
pub fn write_record(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let record = JsonRecord { key: JsonBytes(key), value: JsonBytes(value) };
    serde_json::to_writer(&mut *out, &record).expect("writing to memory cannot fail");
    out.push(b'\n');
}

/// Reads a line (without its newline) into `record`.
pub fn parse(line: &[u8], record: &mut Record) -> Result<(), String> {
    let parsed: OwnedJsonRecord = serde_json::from_slice(line).map_err(|error| {
        // The parser sees one line at a time; only its column means something to the user.
        let text = error.to_string();
        let what = text.rsplit_once(" at line ").map_or(&*text, |(what, _)| what);
        format!("column {}: {what}", error.column())
    })?;
    record.key = parsed.key.0;
    record.value = parsed.value.0;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{failing_line, read_all};
    use super::super::{Format, Record};
    use super::*;

    #[test]
    fn text_is_written_as_the_documentation_shows() {
        let mut out = Vec::new();
        write_record(&mut out, b"caf\xc3\xa9", b"\xff\x00");
        assert_eq!(out, "{\"key\":\"café\",\"value\":{\"base64\":\"/wA=\"}}\n".as_bytes());
    }

    #[test]
    fn spacing_order_and_needless_base64_are_accepted() {
        let text = br#" { "value" : {"base64":"aGk="} , "key" : "\u00e9\n" } "#;
        let expected = Record { key: b"\xc3\xa9\n".to_vec(), value: b"hi".to_vec() };
        assert_eq!(read_all(Format::JsonLines, text).unwrap(), [expected]);
    }

    #[test]
    fn malformed_lines_are_named() {
        let good = r#"{"key":"a","value":"b"}"#;
        let cases = [
            ("", "EOF"),
            ("{", "EOF"),
            (r#"{"key":"a"}"#, "missing field `value`"),
            (r#"{"key":"a","value":1}"#, "expected a string"),
            (r#"{"key":"a","value":"b","ttl":3}"#, "unknown field `ttl`"),
            (r#"{"key":"a","key":"b","value":"c"}"#, "duplicate field `key`"),
            (r#"{"key":"a","value":{"base64":"?"}}"#, "`?` is no base64"),
            (r#"{"key":"a","value":{"base64":"YWé="}}"#, "`é` is no base64"),
            (r#"{"key":"a","value":{"base64":"YW"}}"#, "its end is missing"),
            (r#"{"key":"a","value":{"hex":"00"}}"#, "unknown field `hex`"),
            (r#"{"key":"a","value":{}}"#, "missing field `base64`"),
            (r#"{"key":"a","value":"\ud800"}"#, "hex escape"),
            (r#"{"key":"a","value":"b"} x"#, "trailing characters"),
        ];
        for (line, reason) in cases {
            let found = failing_line(Format::JsonLines, format!("{good}\n{line}\n").as_bytes());
            assert_eq!(found.0, 2, "{line}: {found:?}");
            assert!(found.1.contains(reason), "{line}: {found:?}");
        }
    }
}
