//! The hand-over protocol keeps its promises in every interleaving of a few requests, whatever single fault or pair of
//! faults strikes; and each of its rules is needed. What is promised is in the model's `properties`, its rules are in
//! `rules`, what it does in `redis`, `request`, `hand_over` and `beat`.
//!
//! Here a request is written as its replica and the rank of its tier; rank 0 is the highest.

use bouncer::admission::order;
use handover_model::explore::{Explored, STUCK, explore};
use handover_model::rules::{Drain, Fault, Rules, World};

/// Two replicas; two tiers at one of them.
const THREE: [(u8, u8); 3] = [(0, 0), (1, 1), (0, 1)];
const FOUR: [(u8, u8); 4] = [(0, 0), (1, 1), (0, 1), (1, 0)];
const TWO: [(u8, u8); 2] = [(0, 0), (1, 1)];

/// More states than any exploration here has, and as many as fit into a few gigabytes.
const MOST: usize = 12_000_000;

fn world(cap: usize, requests: &[(u8, u8)], faults: &[Fault]) -> World {
    World::new(cap, requests, order::strict).with(faults)
}

/// Every promise is kept, and every state can come to rest.
fn holds(world: &World) -> Explored {
    match explore(world, MOST) {
        Ok(explored) => {
            println!("cap {} {:?} {:?}: {explored:?}", world.cap, world.requests, world.faults);
            explored
        }
        Err(fault) => panic!("{} with {:?}:\n{}", fault.breach, world.faults, fault.trace),
    }
}

/// Without a rule, the model finds what it is for.
fn breaks(world: World, without: impl FnOnce(&mut Rules), breach: &str) {
    let world = world.broken(without);
    let fault = explore(&world, MOST).expect_err("the rule is not needed, or its breach is not noticed");
    println!("{}", fault.trace);
    assert_eq!(fault.breach, breach, "{}", fault.trace);
}

/// Every pair of faults, a fault with itself included, in as many parts as tests run it.
fn pairs(part: usize, parts: usize) -> impl Iterator<Item = [Fault; 2]> {
    let pairs = Fault::ALL.iter().enumerate().flat_map(|(at, one)| Fault::ALL[at..].iter().map(|other| [*one, *other]));
    pairs.skip(part).step_by(parts)
}

#[test]
fn while_nothing_fails_all_are_served_in_order_and_no_slot_is_wasted() {
    for cap in 1..=2 {
        holds(&world(cap, &FOUR, &[]));
        holds(&world(cap, &[(0, 0), (1, 1), (2, 1)], &[]));
        holds(&world(cap, &FOUR, &[]).lengths([1, 1]));
    }
}

#[test]
fn clients_give_up_at_any_step() {
    for cap in 1..=2 {
        holds(&world(cap, &FOUR, &[Fault::Cancel]));
        holds(&world(cap, &THREE, &[Fault::Cancel, Fault::Cancel]));
    }
}

#[test]
fn each_fault_alone_ends_in_rest() {
    for fault in Fault::ALL {
        for cap in 1..=2 {
            holds(&world(cap, &THREE, &[fault]));
            holds(&world(cap, &THREE, &[fault]).lengths([1, 1]));
        }
    }
}

#[test]
fn each_pair_of_faults_ends_in_rest_first_half() {
    for pair in pairs(0, 2) {
        holds(&world(1, &THREE, &pair));
    }
}

#[test]
fn each_pair_of_faults_ends_in_rest_second_half() {
    for pair in pairs(1, 2) {
        holds(&world(1, &THREE, &pair));
    }
}

#[test]
fn heartbeats_that_settle_do_as_well() {
    for fault in Fault::ALL {
        for fresh in [true, false] {
            let settling = |rules: &mut Rules| {
                rules.beats_settle = true;
                rules.fresh_slot_ids = fresh;
            };
            holds(&world(1, &THREE, &[fault]).broken(settling));
            for other in Fault::ALL {
                holds(&world(1, &TWO, &[fault, other]).broken(settling));
            }
        }
    }
}

#[test]
#[ignore = "minutes: make model"]
fn long_each_three_faults_of_two_requests() {
    for [one, other] in pairs(0, 1) {
        for third in Fault::ALL {
            if third as usize >= other as usize {
                holds(&world(1, &TWO, &[one, other, third]));
            }
        }
    }
}

#[test]
#[ignore = "minutes: make model"]
fn long_each_pair_of_faults_with_two_slots_and_bounds() {
    for pair in pairs(0, 1) {
        holds(&world(2, &THREE, &pair));
        holds(&world(1, &THREE, &pair).lengths([1, 1]));
    }
}

#[test]
#[ignore = "minutes: make model"]
fn long_each_fault_alone_of_four_requests() {
    for fault in Fault::ALL {
        holds(&world(1, &FOUR, &[fault]));
        // After an empty Redis there are more states than fit.
        if fault != Fault::Flush {
            holds(&world(2, &FOUR, &[fault]));
        }
    }
}

#[test]
#[ignore = "minutes: make model"]
fn long_each_fault_alone_at_three_replicas() {
    for fault in Fault::ALL {
        holds(&world(1, &[(0, 0), (1, 1), (2, 1)], &[fault]));
    }
}

// What each rule is for. Requests are named by their place in the list: 0, 1, 2.

#[test]
fn without_the_epoch_a_slot_is_freed_past_a_waiter() {
    breaks(
        world(1, &THREE, &[]),
        |rules| rules.epoch = false,
        "a slot is free and nobody brings it to a request that waits",
    );
}

#[test]
fn without_the_epoch_waiting_never_ends_unless_heartbeats_help() {
    let without = |rules: &mut Rules| {
        rules.epoch = false;
        rules.heartbeat_takes = false;
    };
    breaks(world(1, &THREE, &[]).only_rest(), without, STUCK);
}

#[test]
fn a_second_try_whose_slot_goes_to_another_is_made_again() {
    let breach = "a slot is free and nobody brings it to a request that waits";
    breaks(world(2, &FOUR, &[]), |rules| rules.tries_until_none = false, breach);
}

#[test]
fn without_the_heartbeats_hand_over_slots_that_come_back_by_themselves_wake_nobody() {
    let without = |rules: &mut Rules| rules.heartbeat_takes = false;
    for fault in [Fault::LostTicket, Fault::Restart, Fault::LostReply, Fault::Cut, Fault::Death, Fault::Flush] {
        breaks(world(1, &THREE, &[fault]).only_rest(), without, STUCK);
    }
    for fault in [Fault::Cancel, Fault::LostGrant, Fault::LateGrant, Fault::LostConfirm, Fault::SlowBeat] {
        holds(&world(1, &THREE, &[fault]).broken(without));
    }
}

#[test]
fn an_acquire_that_heeds_no_waiters_overtakes() {
    breaks(world(1, &THREE, &[]), |rules| rules.acquire_heeds_waiters = false, "an arrival overtakes a waiter");
}

#[test]
fn a_release_that_frees_although_someone_waits_wakes_nobody() {
    let breach = "a slot is free and nobody brings it to a request that waits";
    breaks(world(1, &THREE, &[]), |rules| rules.release_hands_over = false, breach);
}

#[test]
fn a_grant_that_never_expires_keeps_its_slot_for_ever() {
    breaks(world(1, &THREE, &[Fault::LostGrant]), |rules| rules.grants_expire = false, STUCK);
}

#[test]
fn a_heartbeat_that_drops_newer_slots_drops_one_in_use() {
    let breach = "a request in flight has no slot in Redis";
    breaks(world(1, &TWO, &[Fault::SlowBeat]), |rules| rules.newer_ids_stay = false, breach);
}

#[test]
fn a_slot_named_after_a_waiter_is_older_than_it_is_and_dropped_while_in_use() {
    let breach = "a request in flight has no slot in Redis";
    breaks(world(1, &TWO, &[Fault::SlowBeat]), |rules| rules.fresh_slot_ids = false, breach);
}

#[test]
fn a_slot_named_after_a_request_that_has_gone_is_forgotten_with_it() {
    let without = |rules: &mut Rules| {
        rules.beats_settle = true;
        rules.fresh_slot_ids = false;
        rules.the_gone_lend_no_serial = false;
    };
    let breach = "a slot is free and nobody brings it to a request that waits";
    breaks(world(1, &THREE, &[Fault::Cancel]), without, breach);
}

#[test]
fn a_heartbeat_that_adds_what_is_only_being_acquired_makes_a_slot_beyond_the_cap() {
    let without = |rules: &mut Rules| {
        rules.pending_is_not_added = false;
        rules.beats_add_only_to_register = false;
    };
    breaks(world(1, &TWO, &[Fault::LostReply]), without, "more is occupied than the cap allows");
}

#[test]
fn a_heartbeat_that_adds_what_is_missing_brings_back_a_slot_given_up_meanwhile() {
    let breach = "more is occupied than the cap allows";
    breaks(world(1, &TWO, &[Fault::SlowBeat]), |rules| rules.beats_add_only_to_register = false, breach);
}

#[test]
fn a_replica_told_only_once_that_it_was_forgotten_waits_for_ever() {
    let faults = [Fault::LostReply, Fault::Flush];
    breaks(world(1, &TWO, &faults).only_rest(), |rules| rules.forgotten_until_registered = false, STUCK);
}

#[test]
fn what_is_made_without_a_lease_is_never_dropped() {
    let faults = [Fault::Flush, Fault::Death];
    breaks(world(1, &TWO, &faults).only_rest(), |rules| rules.no_lease_no_slot = false, STUCK);
}

#[test]
fn where_only_arrivals_drop_the_dead_those_that_wait_already_wait_for_ever() {
    breaks(world(1, &THREE, &[Fault::Death]), |rules| rules.beats_prune = false, STUCK);
}

#[test]
fn a_waiter_that_asks_again_is_not_turned_away() {
    let world = world(1, &THREE, &[Fault::LostReply]).lengths([1, 1]);
    let breach = "a request that waits is told that the queue is full";
    breaks(world, |rules| rules.acquire_again_is_waiting = false, breach);
}

#[test]
fn an_excess_that_is_handed_on_does_not_end() {
    for fault in [Fault::Cut, Fault::Flush] {
        let breach = "more run than the cap allows";
        breaks(world(1, &THREE, &[fault]), |rules| rules.excess_is_freed = false, breach);
    }
}

#[test]
fn purging_stale_tickets_takes_those_of_new_waiters() {
    let breach = "a slot is free and nobody brings it to a request that waits";
    breaks(world(1, &THREE, &[]), |rules| rules.drain = Drain::Purge, breach);
}

#[test]
fn clearing_stale_tickets_once_leaves_some_so_they_must_expire() {
    breaks(world(1, &THREE, &[Fault::Cancel]), |rules| rules.drain = Drain::Checked, STUCK);
}
