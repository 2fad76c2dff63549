//! The wire protocol of PyTorch's `TCPStore`.
//!
//! A client sends requests: one byte with the kind, then fields without padding. Numbers are
//! little-endian. A string is its length in 8 bytes and its bytes. A list is the number of its
//! entries in 8 bytes and the entries. The server answers each client's requests in order, except
//! that a wait is answered once it is over. The first request of a connection is `VALIDATE`. Client
//! keys begin with `/`; only the counter of arrivals, [`INIT_KEY`], does not.

/// The default port of PyTorch's store.
pub const DEFAULT_PORT: u16 = 29500;
/// The payload of a `VALIDATE` request.
pub(super) const MAGIC: u32 = 0x3C85_F7CE;
/// Precedes each key of a client.
pub(super) const KEY_PREFIX: &str = "/";
/// The counter of clients that have joined; it has no prefix.
pub(super) const INIT_KEY: &str = "init/";
/// Most keys in one request.
pub(super) const MAX_KEYS: u64 = 128 * 1024;
/// Longest key on the wire.
pub(super) const MAX_KEY_BYTES: u64 = 8 * 1024;
/// Longest value in a request.
pub(super) const MAX_VALUE_BYTES: u64 = 8 * 1024 * 1024;
/// Most bytes of one request or one answer: a limit of ours, so that neither side can make the
/// other run out of memory.
pub(super) const MAX_MESSAGE_BYTES: usize = 256 * 1024 * 1024;

/// Answer of `CHECK`: all keys exist.
pub(super) const READY: u8 = 0;
/// Answer of `CHECK`: a key is missing.
pub(super) const NOT_READY: u8 = 1;
/// Answer of `WAIT` and `BARRIER`: all keys or clients have arrived.
pub(super) const STOP_WAITING: u8 = 0;
/// Answer of `CANCEL_WAIT`.
pub(super) const WAIT_CANCELED: u8 = 1;

/// The first byte of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Query {
    Validate = 0,
    Set,
    CompareSet,
    Get,
    Add,
    Check,
    Wait,
    NumKeys,
    DeleteKey,
    Append,
    MultiGet,
    MultiSet,
    CancelWait,
    Ping,
    QueuePush,
    QueuePop,
    QueueLen,
    ListKeys,
    Barrier,
}

impl Query {
    const ALL: [Query; 19] = [
        Query::Validate,
        Query::Set,
        Query::CompareSet,
        Query::Get,
        Query::Add,
        Query::Check,
        Query::Wait,
        Query::NumKeys,
        Query::DeleteKey,
        Query::Append,
        Query::MultiGet,
        Query::MultiSet,
        Query::CancelWait,
        Query::Ping,
        Query::QueuePush,
        Query::QueuePop,
        Query::QueueLen,
        Query::ListKeys,
        Query::Barrier,
    ];

    fn from_byte(byte: u8) -> Result<Query, Violation> {
        Query::ALL
            .get(usize::from(byte))
            .copied()
            .ok_or_else(|| Violation(format!("{byte} is not a request")))
    }

    /// The request's fields, and the fields that repeat as often as its count specifies.
    fn layout(self) -> (&'static [Field], &'static [Field]) {
        use Field::{Count, Key, Number, Value, Word};
        match self {
            Query::Validate | Query::Ping => (&[Word], &[]),
            Query::Set | Query::Append | Query::QueuePush => (&[Key, Value], &[]),
            Query::CompareSet => (&[Key, Value, Value], &[]),
            Query::Get | Query::DeleteKey | Query::QueuePop | Query::QueueLen => (&[Key], &[]),
            Query::Add | Query::Barrier => (&[Key, Number], &[]),
            Query::Check | Query::Wait | Query::MultiGet => (&[Count], &[Key]),
            Query::MultiSet => (&[Count], &[Key, Value]),
            Query::NumKeys | Query::CancelWait | Query::ListKeys => (&[], &[]),
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Field {
    /// 4 bytes.
    Word,
    /// 8 bytes.
    Number,
    /// 8 bytes: how many entries follow.
    Count,
    Key,
    Value,
}

/// A request that breaks the protocol; its connection is closed.
#[derive(Debug)]
pub(super) struct Violation(pub(super) String);

/// Finds the end of the request that begins at the start of a buffer, which may still grow. Keeps
/// its position, so that each byte is parsed once, however slowly bytes arrive.
#[derive(Debug, Default)]
pub(super) struct Framer {
    /// Where the next field begins; 0 before the first byte.
    position: usize,
    head: &'static [Field],
    entry: &'static [Field],
    /// Fields found.
    fields: u64,
    /// Entries to come after the head.
    entries: u64,
}

impl Framer {
    /// The request's length; `None` while bytes are missing. After a length the framer is at the
    /// next request.
    pub(super) fn advance(&mut self, bytes: &[u8]) -> Result<Option<usize>, Violation> {
        if self.position == 0 {
            let Some(first) = bytes.first() else {
                return Ok(None);
            };
            (self.head, self.entry) = Query::from_byte(*first)?.layout();
            self.position = 1;
        }
        while let Some(field) = self.field() {
            let rest = bytes.get(self.position..).unwrap_or_default();
            let Some(length) = field_length(field, rest)? else {
                return Ok(None);
            };
            if self.position + length > MAX_MESSAGE_BYTES {
                return Err(Violation(format!("a request of more than {MAX_MESSAGE_BYTES} bytes")));
            }
            if rest.len() < length {
                return Ok(None);
            }
            if let (Field::Count, Some(count)) = (field, rest.first_chunk()) {
                self.entries = u64::from_le_bytes(*count);
            }
            self.position += length;
            self.fields += 1;
        }
        let length = self.position;
        *self = Framer::default();
        Ok(Some(length))
    }

    /// The next field of the request.
    fn field(&self) -> Option<Field> {
        let head = self.head.len() as u64;
        if self.fields < head {
            return self.head.get(self.fields as usize).copied();
        }
        let (index, fields) = (self.fields - head, self.entry.len() as u64);
        if index >= self.entries * fields {
            return None;
        }
        self.entry.get((index % fields) as usize).copied()
    }
}

/// Bytes of the field that `rest` begins with; `None` if more bytes are needed.
fn field_length(field: Field, rest: &[u8]) -> Result<Option<usize>, Violation> {
    let (most, what) = match field {
        Field::Word => return Ok(Some(4)),
        Field::Number => return Ok(Some(8)),
        Field::Count => (MAX_KEYS, "keys"),
        Field::Key => (MAX_KEY_BYTES, "bytes of a key"),
        Field::Value => (MAX_VALUE_BYTES, "bytes of a value"),
    };
    let Some(number) = rest.first_chunk().map(|chunk| u64::from_le_bytes(*chunk)) else {
        return Ok(None);
    };
    if number > most {
        return Err(Violation(format!("{number} {what}, at most {most} are allowed")));
    }
    Ok(Some(if matches!(field, Field::Count) { 8 } else { 8 + number as usize }))
}

/// A request, complete and well-formed; borrows from the bytes received.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Request<'a> {
    Validate(u32),
    Ping(u32),
    Set { key: &'a [u8], value: &'a [u8] },
    CompareSet { key: &'a [u8], expected: &'a [u8], desired: &'a [u8] },
    Get(&'a [u8]),
    Add { key: &'a [u8], delta: i64 },
    Check(Vec<&'a [u8]>),
    Wait(Vec<&'a [u8]>),
    NumKeys,
    DeleteKey(&'a [u8]),
    Append { key: &'a [u8], value: &'a [u8] },
    MultiGet(Vec<&'a [u8]>),
    MultiSet(Vec<(&'a [u8], &'a [u8])>),
    CancelWait,
    QueuePush { key: &'a [u8], value: &'a [u8] },
    QueuePop(&'a [u8]),
    QueueLen(&'a [u8]),
    ListKeys,
    Barrier { key: &'a [u8], size: i64 },
}

impl<'a> Request<'a> {
    /// Reads what a [`Framer`] found to be one request.
    pub(super) fn decode(bytes: &'a [u8]) -> Result<Request<'a>, Violation> {
        let mut fields = Fields(bytes);
        let query = Query::from_byte(fields.take::<1>()?[0])?;
        Ok(match query {
            Query::Validate => Request::Validate(fields.word()?),
            Query::Ping => Request::Ping(fields.word()?),
            Query::Set => Request::Set { key: fields.string()?, value: fields.string()? },
            Query::CompareSet => Request::CompareSet {
                key: fields.string()?,
                expected: fields.string()?,
                desired: fields.string()?,
            },
            Query::Get => Request::Get(fields.string()?),
            Query::Add => Request::Add { key: fields.string()?, delta: fields.number()? },
            Query::Check => Request::Check(fields.list(Fields::string)?),
            Query::Wait => Request::Wait(fields.list(Fields::string)?),
            Query::NumKeys => Request::NumKeys,
            Query::DeleteKey => Request::DeleteKey(fields.string()?),
            Query::Append => Request::Append { key: fields.string()?, value: fields.string()? },
            Query::MultiGet => Request::MultiGet(fields.list(Fields::string)?),
            Query::MultiSet => {
                Request::MultiSet(fields.list(|fields| Ok((fields.string()?, fields.string()?)))?)
            }
            Query::CancelWait => Request::CancelWait,
            Query::QueuePush => Request::QueuePush { key: fields.string()?, value: fields.string()? },
            Query::QueuePop => Request::QueuePop(fields.string()?),
            Query::QueueLen => Request::QueueLen(fields.string()?),
            Query::ListKeys => Request::ListKeys,
            Query::Barrier => Request::Barrier { key: fields.string()?, size: fields.number()? },
        })
    }
}

/// The rest of a request.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Violation> {
        let (chunk, rest) = self.0.split_first_chunk().ok_or_else(cut_short)?;
        self.0 = rest;
        Ok(*chunk)
    }

    fn word(&mut self) -> Result<u32, Violation> {
        self.take().map(u32::from_le_bytes)
    }

    fn number(&mut self) -> Result<i64, Violation> {
        self.take().map(i64::from_le_bytes)
    }

    fn string(&mut self) -> Result<&'a [u8], Violation> {
        let length = usize::try_from(self.number()?).map_err(|_| cut_short())?;
        let (string, rest) = self.0.split_at_checked(length).ok_or_else(cut_short)?;
        self.0 = rest;
        Ok(string)
    }

    fn list<T>(
        &mut self,
        mut entry: impl FnMut(&mut Self) -> Result<T, Violation>,
    ) -> Result<Vec<T>, Violation> {
        let count = self.number()?;
        // Grows as entries are found: the count alone must not allocate.
        (0..count).map(|_| entry(self)).collect()
    }
}

fn cut_short() -> Violation {
    Violation("a request that is cut short".to_owned())
}

/// Puts a message together.
#[derive(Debug, Default)]
pub(super) struct Message(pub(super) Vec<u8>);

impl Message {
    pub(super) fn query(query: Query) -> Message {
        Message(vec![query as u8])
    }

    /// Begins another request, sent with what is there already.
    pub(super) fn then(mut self, query: Query) -> Message {
        self.0.push(query as u8);
        self
    }

    pub(super) fn word(mut self, word: u32) -> Message {
        self.0.extend_from_slice(&word.to_le_bytes());
        self
    }

    pub(super) fn number(mut self, number: i64) -> Message {
        self.0.extend_from_slice(&number.to_le_bytes());
        self
    }

    /// The number of entries of a list.
    pub(super) fn count(mut self, count: usize) -> Message {
        self.0.extend_from_slice(&(count as u64).to_le_bytes());
        self
    }

    pub(super) fn string(mut self, bytes: &[u8]) -> Message {
        self.0.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        self.0.extend_from_slice(bytes);
        self
    }

    /// A client's key.
    pub(super) fn key(mut self, key: &str) -> Message {
        self.0.extend_from_slice(&((KEY_PREFIX.len() + key.len()) as u64).to_le_bytes());
        self.0.extend_from_slice(KEY_PREFIX.as_bytes());
        self.0.extend_from_slice(key.as_bytes());
        self
    }

    pub(super) fn keys(self, keys: &[&str]) -> Message {
        keys.iter().fold(self.count(keys.len()), |message, key| message.key(key))
    }
}

/// Reads bytes as the server does. Any division into pieces gives the same requests, and each can
/// be read.
pub fn fuzz_requests(bytes: &[u8]) {
    let find = |pieces: &mut dyn Iterator<Item = &[u8]>| {
        let (mut framer, mut buffer, mut start, mut ends) = (Framer::default(), Vec::new(), 0, Vec::new());
        for piece in pieces {
            buffer.extend_from_slice(piece);
            loop {
                match framer.advance(&buffer[start..]) {
                    Ok(Some(length)) => {
                        assert!(length > 0 && start + length <= buffer.len());
                        let request = Request::decode(&buffer[start..start + length]);
                        assert!(request.is_ok(), "{request:?}");
                        start += length;
                        ends.push(start);
                    }
                    Ok(None) => break,
                    Err(_) => return (ends, false),
                }
            }
        }
        (ends, true)
    };
    let in_pieces = find(&mut crate::internal::fuzz::pieces(bytes));
    assert_eq!(in_pieces, find(&mut bytes.get(1..).into_iter()));
    // Other bytes are rejected and do no harm.
    let _ = Request::decode(bytes);
}

/// A request of each kind.
pub fn sample_requests() -> Vec<Vec<u8>> {
    let key_value = |query| Message::query(query).key("k").string(b"value");
    let keys = |query| Message::query(query).keys(&["a", "bc", ""]);
    let all = [
        Message::query(Query::Validate).word(MAGIC),
        Message::query(Query::Ping).word(7),
        key_value(Query::Set),
        key_value(Query::CompareSet).string(b"desired"),
        key_value(Query::Append),
        key_value(Query::QueuePush),
        Message::query(Query::Get).key("k"),
        Message::query(Query::Add).key("n").number(-1),
        Message::query(Query::Barrier).key("b").number(2),
        keys(Query::Check),
        keys(Query::Wait),
        keys(Query::MultiGet),
        Message::query(Query::MultiSet).count(2).key("a").string(b"1").key("b").string(b""),
        Message::query(Query::CancelWait).then(Query::NumKeys).then(Query::ListKeys),
        Message::query(Query::DeleteKey)
            .key("k")
            .then(Query::QueuePop)
            .key("q")
            .then(Query::QueueLen)
            .key("q"),
    ];
    let whole: Vec<u8> = all.iter().flat_map(|message| message.0.clone()).collect();
    // Behind a byte with the length of the pieces.
    all.into_iter().map(|message| message.0).chain([whole]).map(|bytes| [&[3], &bytes[..]].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn framing_byte_by_byte() {
        let messages = [
            Message::query(Query::Validate).word(MAGIC),
            Message::query(Query::MultiSet).count(2).key("a").string(b"1").key("b").string(b""),
            Message::query(Query::Wait).keys(&["x", "y"]),
            Message::query(Query::NumKeys),
            Message::query(Query::Check).count(0),
            Message::query(Query::Barrier).key("b").number(-7),
        ];
        let stream: Vec<u8> = messages.iter().flat_map(|message| message.0.clone()).collect();
        let (mut framer, mut start, mut found) = (Framer::default(), 0, Vec::new());
        for end in 0..=stream.len() {
            while let Some(length) = framer.advance(&stream[start..end]).unwrap() {
                found.push(stream[start..start + length].to_vec());
                start += length;
            }
        }
        assert_eq!(found, messages.iter().map(|message| message.0.clone()).collect::<Vec<_>>());
        assert_eq!(Request::decode(&found[1]).unwrap(), Request::MultiSet(vec![(b"/a", b"1"), (b"/b", b"")]));
        assert_eq!(Request::decode(&found[5]).unwrap(), Request::Barrier { key: b"/b", size: -7 });
        assert!(Request::decode(&found[1][..found[1].len() - 1]).is_err());
    }

    #[test]
    fn huge_lengths_are_refused_at_once() {
        let cases = [
            Message::query(Query::Get).number(i64::MAX),
            Message::query(Query::Get).number(-1),
            Message::query(Query::Set).key("k").number(MAX_VALUE_BYTES as i64 + 1),
            Message::query(Query::Wait).number(MAX_KEYS as i64 + 1),
            Message(vec![19]),
            Message(vec![255]),
        ];
        for message in cases {
            assert!(Framer::default().advance(&message.0).is_err(), "{message:?}");
        }
    }
}
