//! A socket that never blocks, with or without TLS on it.

use super::address::Address;
use super::budget::{Budget, Trouble};
use rustix::event::PollFlags;
use rustls::ClientConnection;
use std::io::{Error, ErrorKind, IoSliceMut, Read, Result, Write};
use std::net::TcpStream;

pub(super) enum Stream {
    Plain(TcpStream),
    Encrypted { socket: TcpStream, session: Box<ClientConnection> },
}

impl Stream {
    /// Over a socket that does not block; with TLS, once the server has shown who it is.
    pub(super) fn open(
        socket: TcpStream,
        address: &Address,
        budget: &mut Budget,
    ) -> std::result::Result<Self, Trouble> {
        let Some(tls) = &address.tls else { return Ok(Self::Plain(socket)) };
        let session = tls.session(&address.host).map_err(Trouble::Gone)?;
        let mut made = Self::Encrypted { socket, session: Box::new(session) };
        made.shake_hands(budget)?;
        Ok(made)
    }

    fn shake_hands(&mut self, budget: &mut Budget) -> std::result::Result<(), Trouble> {
        loop {
            let all_sent = self.flush().map_err(|error| Trouble::of(&error))?;
            let Self::Encrypted { socket, session } = self else { return Ok(()) };
            if all_sent && !session.is_handshaking() {
                return Ok(());
            }
            let event = if all_sent {
                match advance(socket, session) {
                    Ok(0) => return Err(Trouble::Gone("it ends the connection".into())),
                    Ok(_) => continue,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => PollFlags::IN,
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) => return Err(Trouble::of(&error)),
                }
            } else {
                PollFlags::OUT
            };
            budget.wait(socket, event)?;
        }
    }

    /// What to wait on. Only after a read or a write that would have blocked: bytes may be here already.
    pub(super) fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(socket) | Self::Encrypted { socket, .. } => socket,
        }
    }

    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        let (socket, session) = match self {
            Self::Plain(socket) => return socket.read(into),
            Self::Encrypted { socket, session } => (socket, session),
        };
        loop {
            match session.reader().read(into) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                read => return read,
            }
            if advance(socket, session)? == 0 {
                return Ok(0);
            }
        }
    }

    /// With TLS into the first of them alone.
    pub(super) fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> Result<usize> {
        if let Self::Plain(socket) = self {
            return socket.read_vectored(into);
        }
        let first = into.iter_mut().find(|slice| !slice.is_empty());
        first.map_or(Ok(0), |slice| self.read(slice))
    }

    /// Takes some of these bytes. With TLS they may not be on their way yet: `is_behind`.
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        if let Self::Plain(socket) = self {
            return socket.write(bytes);
        }
        if !self.flush()? {
            return Err(ErrorKind::WouldBlock.into());
        }
        let Self::Encrypted { session, .. } = self else { return Ok(0) };
        let taken = session.writer().write(bytes)?;
        self.flush()?;
        Ok(taken)
    }

    /// Whether bytes that were taken wait to be sent.
    pub(super) fn is_behind(&self) -> bool {
        matches!(self, Self::Encrypted { session, .. } if session.wants_write())
    }

    /// Sends what was taken and goes without waiting; whether that is all.
    pub(super) fn flush(&mut self) -> Result<bool> {
        let Self::Encrypted { socket, session } = self else { return Ok(true) };
        while session.wants_write() {
            match session.write_tls(socket) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// Reads from the socket what there is, and makes of it what it means; 0: the other side ended.
fn advance(socket: &mut TcpStream, session: &mut ClientConnection) -> Result<usize> {
    let read = session.read_tls(socket)?;
    if let Err(error) = session.process_new_packets() {
        let _told_or_not = session.write_tls(socket);
        return Err(Error::new(ErrorKind::InvalidData, error));
    }
    Ok(read)
}
